"""Spark properties on which each message is delivered once."""

import pytest
from pyspark import SparkConf

from duetime.core.errors import ConfigError
from duetime.spark.session import REQUIRED_PROPERTIES, require_properties


@pytest.fixture
def conf():
    """All of them, without a JVM."""
    return SparkConf(loadDefaults=False).setAll(list(REQUIRED_PROPERTIES.items()))


def test_the_required_properties_are_accepted(conf):
    require_properties(conf)


@pytest.mark.parametrize("name", REQUIRED_PROPERTIES)
def test_another_value_of_a_required_property_is_refused(conf, name):
    with pytest.raises(ConfigError, match=rf"{name} is other, .* only with .*: remove it"):
        require_properties(conf.set(name, "other"))
