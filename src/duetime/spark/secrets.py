"""Secrets in tasks: executors have them in their environment, and no task carries one.

Spark writes tasks to event logs and disks, and sends them through the network in clear unless told
otherwise. So a task of a cluster names an environment variable: Kafka's clients resolve it
(KIP-887), and Python code reads TASK_SECRETS. Executors get the variables when they are started
(`spark.executorEnv`). Spark's pages do not show them, because their names contain SECRET.
"""

import json
import os
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from pydantic import SecretStr

from duetime.core.settings import Settings
from duetime.kafka.connection import SECRET, TASK_VARIABLE, java_properties, secret_variable

#: The variable with the secret settings of Python code, by namespace.
TASK_SECRETS = f"{TASK_VARIABLE}SETTINGS"

#: Settings that are secret, and settings of properties, some of which may be.
WORDS = "store", "sasl_password"
PROPERTIES = "java_properties", "librdkafka_properties"


@dataclass(frozen=True)
class TaskSettings:
    """Settings that travel with a task; without secrets where its environment has them."""

    public: Settings

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the settings for a task."""
        if TASK_SECRETS not in os.environ:
            return cls(settings)
        public: dict[str, object] = {name: _open(settings, name) for name in PROPERTIES}
        public |= {"store": SecretStr(settings.store_kind), "sasl_password": None}
        # No task reads them.
        public |= {"api_tokens": {}, "clusters": {}, "spark_properties": {}}
        return cls(settings.model_copy(update=public))

    def read(self) -> Settings:
        """Return the settings with their secrets, in a task."""
        text = b64decode(os.environ.get(TASK_SECRETS, "")) or "{}"
        found = json.loads(text).get(self.public.namespace)
        if found is None:
            return self.public
        secret: dict[str, object] = {
            name: getattr(self.public, name) | found[name] for name in PROPERTIES
        }
        secret |= {name: SecretStr(found[name]) for name in WORDS if found[name]}
        return self.public.model_copy(update=secret)


def task_environment(settings: Settings) -> dict[str, str]:
    """Return the variables that tasks under these settings need."""
    variables: dict[str, str] = {}
    secrets = {}
    for cluster in (None, *settings.clusters):
        at = settings.at(cluster)
        for name, value in java_properties(at).items():
            if SECRET.search(name):
                variables[secret_variable(at, name)] = value
        words = {name: getattr(at, name) for name in WORDS}
        secrets[at.namespace] = {
            **{name: word.get_secret_value() if word else "" for name, word in words.items()},
            **{name: dict(getattr(at, name)) for name in PROPERTIES},
        }
    # YARN writes the environment into a script, without escapes.
    return variables | {TASK_SECRETS: b64encode(json.dumps(secrets).encode()).decode()}


def _open(settings: Settings, name: str) -> dict[str, str]:
    """Return a setting of properties without those that are secret."""
    properties: Mapping[str, str] = getattr(settings, name)
    return {key: value for key, value in properties.items() if not SECRET.search(key)}
