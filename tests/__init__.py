"""A package, so that each of its modules has one name: `tests.system.conftest` is loaded once."""
