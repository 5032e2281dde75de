import logging
import sys

from duetime.cli.logs import OneLine


class ErrorOfAnEndedJvm(Exception):
    def __str__(self):
        raise ConnectionRefusedError


def line(error):
    try:
        raise error
    except type(error):
        info = sys.exc_info()
    record = logging.LogRecord("duetime", logging.ERROR, __file__, 1, "turn failed", (), info)
    return OneLine("%(levelname)s %(message)s").format(record)


def test_an_exception_is_one_line():
    assert line(ValueError("first\nsecond")) == "ERROR turn failed ValueError: first"


def test_an_error_that_cannot_be_told_any_more_is_named():
    assert line(ErrorOfAnEndedJvm()) == "ERROR turn failed ErrorOfAnEndedJvm: "
