"""How clients reach the cluster: one set of settings, rendered for Java and for librdkafka.

Spark's connector uses Kafka's Java client and Python uses librdkafka; they name the same security
settings differently. Nothing here opens a connection.
"""

from pathlib import Path

from duetime.errors import ConfigError
from duetime.tables import Connection


def java_properties(settings: Connection) -> dict[str, str]:
    """Properties of a Java Kafka client. Source: Kafka documentation, Security; KIP-651 for PEM."""
    properties = {
        "bootstrap.servers": settings.bootstrap,
        "security.protocol": settings.security_protocol,
    }
    if settings.sasl_mechanism:
        properties["sasl.mechanism"] = settings.sasl_mechanism
        properties["sasl.jaas.config"] = _jaas(settings)
    if settings.ssl_ca:
        properties |= {
            "ssl.truststore.type": "PEM",
            "ssl.truststore.certificates": _read("ssl_ca", settings.ssl_ca),
        }
    if settings.ssl_certificate and settings.ssl_key:
        properties |= {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.certificate.chain": _read("ssl_certificate", settings.ssl_certificate),
            "ssl.keystore.key": _read("ssl_key", settings.ssl_key),
        }
    return properties | settings.java_properties


def spark_properties(settings: Connection) -> dict[str, str]:
    """The same as options of Spark's Kafka source and sink."""
    return {f"kafka.{name}": value for name, value in java_properties(settings).items()}


def librdkafka_properties(settings: Connection) -> dict[str, str | int | float | bool]:
    """Properties of a confluent-kafka client. Source: librdkafka's CONFIGURATION.md."""
    properties: dict[str, str | int | float | bool] = {
        "bootstrap.servers": settings.bootstrap,
        "security.protocol": settings.security_protocol,
        # One sentence from us instead of librdkafka's lines on stderr.
        "log_level": 2,
    }
    if settings.sasl_mechanism:
        properties["sasl.mechanism"] = settings.sasl_mechanism
        properties["sasl.username"] = settings.sasl_username or ""
        properties["sasl.password"] = _password(settings)
    for name, path in (
        ("ssl.ca.location", settings.ssl_ca),
        ("ssl.certificate.location", settings.ssl_certificate),
        ("ssl.key.location", settings.ssl_key),
    ):
        if path:
            properties[name] = str(path)
    return properties | settings.librdkafka_properties


def _jaas(settings: Connection) -> str:
    modules = {
        "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
        "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
        "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
    }
    module = modules.get(settings.sasl_mechanism or "")
    if module is None:
        raise ConfigError(
            f"sasl_mechanism {settings.sasl_mechanism} is not one of {', '.join(modules)}: for "
            "others, set java_properties and librdkafka_properties"
        )
    user, password = _quoted(settings.sasl_username or ""), _quoted(_password(settings))
    return f"{module} required username={user} password={password};"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _password(settings: Connection) -> str:
    return settings.sasl_password.get_secret_value() if settings.sasl_password else ""


def _read(setting: str, path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting} cannot be read as a PEM file: {error}") from None
