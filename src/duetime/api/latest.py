"""A dict that remembers the latest, so that what strangers send cannot fill the memory."""

from collections import OrderedDict
from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Latest(OrderedDict[_Key, _Value]):
    """At most so many. What was noted first is forgotten first, also where it was seen again."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: _Key, value: _Value) -> None:
        """Note it, and forget what is too much; `setdefault` does so, too."""
        super().__setitem__(key, value)
        while len(self) > self._most:
            self.popitem(last=False)
