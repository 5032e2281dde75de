"""Plugins and limits of all tests, and their distribution among processes."""

import json
import os
from pathlib import Path

import hypothesis
import pytest
import pytest_timeout

from duetime.spark.session import JAVA_OPTIONS

# Their assertions tell what they compared, as those of tests do.
pytest.register_assert_rewrite("tests.support")

#: Where fixtures are that tests of several folders share.
pytest_plugins = [
    "tests.support.api",
    "tests.support.clocks",
    "tests.support.delayed_topics",
    "tests.support.jobs",
    "tests.support.live",
    "tests.support.made_kafka",
    "tests.support.redis_pipeline",
    "tests.support.servers",
    "tests.support.spooling",
    "tests.support.topics",
    "tests.support.wheel",
]

# Tests start many JVMs and keep each for a minute: compiling their code twice would take longer
# than it saves.
os.environ["DUETIME_SPARK_PROPERTIES"] = json.dumps({JAVA_OPTIONS: "-XX:TieredStopAtLevel=1"})

# A shared machine may stand still for seconds, at any example.
hypothesis.settings.register_profile("shared", deadline=None)
hypothesis.settings.load_profile("shared")

HERE = Path(__file__).parent

#: Of every test in a folder.
MARKERS = {
    "integration": ("system",),
    "system": ("system",),
    "hostile": ("system", "hostile", "slow"),
}

#: Where tests share one pipeline, and where others start their own.
SHARED = "tests/system/shared/"
LONG = "tests/system/"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """All tests of the one pipeline in one process, one after the other; others file by file."""
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415 (only where there are several)

    class OnePipeline(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return SHARED if file.startswith(SHARED) else file

    return OnePipeline(config, log)


def pytest_itemcollected(item):
    """Mark each test by its folder."""
    folder = item.path.relative_to(HERE).parts[0]
    for marker in MARKERS.get(folder, ()):
        item.add_marker(marker)


def pytest_collection_modifyitems(config, items):
    """The longest first: one process gets those of the one pipeline, the others begin with LONG."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: [not item.nodeid.startswith(each) for each in (SHARED, LONG)])


#: Seconds that whatever a test leaves behind may take to end, the session's servers included.
END_S = 240


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    """A failed test's end has a limit too: pytest-timeout forgets a test once it has failed."""
    limit = pytest_timeout.Settings(
        END_S, "signal", func_only=False, disable_debugger_detection=False
    )
    item.ihook.pytest_timeout_set_timer(item=item, settings=limit)
    return (yield)
