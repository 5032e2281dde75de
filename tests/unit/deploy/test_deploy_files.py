"""What is in deploy/ speaks of what the code has. Nothing here is run but its linters.

A linter that is missing skips on a laptop and fails in CI.
"""

import json
import os
import re
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from prometheus_client import REGISTRY
from tests.support import ROOT
from tests.support.servers import program

from duetime.cli import app
from duetime.core import metrics
from duetime.core.settings import Settings
from duetime.spark.session import REQUIRED_PROPERTIES

DEPLOY = ROOT / "deploy"
DASHBOARD = DEPLOY / "grafana" / "duetime.json"
RULES = DEPLOY / "prometheus" / "duetime.rules.yml"
SCRAPE = RULES.with_name("scrape.yml")
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
COMPOSE = DEPLOY / "docker" / "compose.yaml"
ENTRYPOINT = DEPLOY / "docker" / "entrypoint.sh"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))

#: Variables that Spark sets for an executor's container, besides its Java options.
EXECUTOR_VARIABLES = (
    *("DRIVER_URL", "EXECUTOR_ID", "EXECUTOR_CORES", "APPLICATION_ID", "EXECUTOR_POD_IP"),
    *("RESOURCE_PROFILE_ID", "EXECUTOR_POD_NAME", "EXECUTOR_MEMORY"),
)

#: The release whose schemas the manifests fit; docs/deploying.md names it.
KUBERNETES = "1.37"

#: What a sample of a metric is called, by the metric's type, beside its name.
SAMPLES = {"gauge": [""], "counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}

#: What Prometheus says of every sample itself.
OF_THE_TARGET = {"job", "instance"}

#: The metrics themselves: a gauge, a counter or a histogram each.
METRICS = [each for each in vars(metrics).values() if hasattr(each, "_labelnames")]

FAMILIES = [family for each in METRICS for family in each.describe()]

#: The labels of what is exported, by the names that Prometheus sees.
EXPORTED = {
    family.name + end: {*each._labelnames, *(["le"] if end == "_bucket" else [])}
    for each in METRICS
    for family in each.describe()
    for end in SAMPLES[family.type]
}


TARGETS = [
    target
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    for target in panel["targets"]
]


ALERTS = {
    rule["alert"]: rule["expr"]
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
}

EXPRESSIONS = [*ALERTS.values(), *(target["expr"] for target in TARGETS)]


def named(expression):
    return set(re.findall(r"\bduetime_\w+", expression))


NAMED = {name for each in EXPRESSIONS for name in named(each)}


def test_every_metric_that_is_named_is_exported():
    assert EXPORTED.keys() >= NAMED


def test_what_is_exported_is_what_the_registry_has():
    # is_leader is registered only by a process with a pipeline; another test of this one may have.
    registered = {each.name for each in REGISTRY.collect() if "duetime_" in each.name}
    assert registered | {"duetime_is_leader"} == {each.name for each in FAMILIES}


def test_every_metric_is_on_the_dashboard_and_in_the_docs():
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for family in FAMILIES:
        assert any(name.startswith(family.name) for name in NAMED), family.name
        assert f"`{family.name}" in text


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_labels_that_are_named_are_there(expression):
    of_all = OF_THE_TARGET.union(*(EXPORTED[name] for name in named(expression)))
    grouped = re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
    assert {label for each in grouped for label in each.split(", ")} <= of_all
    for name, matchers in re.findall(r"\b(duetime_\w+){([^}]*)}", expression):
        assert set(re.findall(r"(\w+)[=!]", matchers)) <= EXPORTED[name] | OF_THE_TARGET


@pytest.mark.parametrize("target", TARGETS, ids=lambda each: each["expr"])
def test_lines_of_a_panel_are_told_apart_by_their_legends(target):
    labels = {
        label
        for listed in re.findall(r"\bby \(([^)]*)\)", target["expr"])
        for label in listed.split(", ")
    }
    assert labels - {"le"} <= set(re.findall(r"{{(\w+)}}", target.get("legendFormat", "")))


def test_every_alert_says_what_to_do():
    text = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
    assert ALERTS
    assert all(f"| `{each}` |" in text for each in ALERTS)


def test_every_alert_is_shown_to_fire_and_to_be_quiet():
    tests = yaml.safe_load(RULES.with_name("duetime.test.yml").read_text(encoding="utf-8"))["tests"]
    cases = [case for each in tests for case in each["alert_rule_test"]]
    for fires in (True, False):
        shown = {each["alertname"] for each in cases if bool(each.get("exp_alerts")) is fires}
        assert shown == ALERTS.keys()


@pytest.fixture(scope="module")
def promtool():
    return program("promtool", "prometheus")


@pytest.mark.parametrize(
    "words", [("check", "rules", RULES), ("test", "rules", RULES.with_name("duetime.test.yml"))]
)
def test_promtool_accepts_the_rules_and_alerts_fire_when_they_should(words, promtool):
    subprocess.run([promtool, *words], check=True, capture_output=True)


def test_promtool_accepts_what_the_dashboard_asks(promtool, tmp_path):
    # As Grafana would fill it in; any other variable is refused as it stands.
    asked = [target["expr"].replace("$__rate_interval", "5m") for target in TARGETS]
    rules = [{"record": f"asked:{number}", "expr": expr} for number, expr in enumerate(asked)]
    path = tmp_path / "asked.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": rules}]}))
    told = subprocess.run([promtool, "check", "rules", path], capture_output=True, check=False)
    assert told.returncode == 0, told.stderr.decode()


def test_promtool_accepts_how_duetime_is_scraped(promtool, tmp_path):
    told = yaml.safe_load(SCRAPE.read_text(encoding="utf-8"))
    # Debian's promtool knows no Kubernetes, but what becomes of the pods' labels.
    for job in told["scrape_configs"]:
        job.pop("kubernetes_sd_configs", None)
    path = tmp_path / SCRAPE.name
    path.write_text(yaml.safe_dump(told))
    words = ["check", "config", "--syntax-only", path]
    done = subprocess.run([promtool, *words], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pods_are_scraped_by_the_labels_and_ports_that_they_have():
    parts = {each["metadata"].get("labels", {}).get("part") for each in objects()}
    ports = {port["name"] for pod in pods() for port in pod["containers"][0].get("ports", [])}
    kept = set(re.findall(r"regex: duetime;(\w+)", SCRAPE.read_text(encoding="utf-8")))
    assert kept == {"metrics", "api"}
    assert kept <= parts | ports


def jobs(namespace):
    """What the pods there are told apart by: the pipelines' job, then the API's."""
    for scraped in yaml.safe_load(SCRAPE.read_text(encoding="utf-8"))["scrape_configs"]:
        for each in scraped.get("relabel_configs", []):
            if each.get("target_label") == "job":
                yield each["replacement"].replace("$1", namespace)


def test_pipelines_of_no_namespace_are_taken_for_the_api_of_another():
    pipelines, apis = zip(*(jobs(each) for each in ("api", "api-x", "x")), strict=True)
    assert len({*pipelines, *apis}) == 6
    is_api = re.search(r'job=~"([^"]+)"', ALERTS["DuetimeApiGone"]).group(1)
    assert [each for each in (*pipelines, *apis) if re.fullmatch(is_api, each)] == [*apis]


@pytest.mark.parametrize("unit", sorted((DEPLOY / "systemd").iterdir()), ids=lambda each: each.name)
def test_systemd_accepts_the_unit(unit, tmp_path):
    systemd = program("systemd-analyze", "systemd")
    # It looks for the program, which is installed where the unit is.
    here = unit.read_text(encoding="utf-8").replace("/opt/duetime/bin/duetime", "/bin/true")
    (tmp_path / unit.name).write_text(here, encoding="utf-8")
    told = subprocess.run(
        [systemd, "verify", str(tmp_path / unit.name)], capture_output=True, text=True, check=False
    )
    assert unit.name not in told.stderr


def test_the_unit_finds_the_jars_where_the_docs_put_them():
    unit = (DEPLOY / "systemd" / "duetime.service").read_text(encoding="utf-8")
    text = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8")
    put = set(re.findall(r"^(DUETIME_JARS=\S+) ", text, flags=re.MULTILINE))
    assert put == set(re.findall(r"^Environment=(DUETIME_JARS=\S+)$", unit, flags=re.MULTILINE))
    assert put


def test_what_is_run_beside_the_units_has_their_secrets():
    (secrets,) = {
        found
        for unit in (DEPLOY / "systemd").iterdir()
        for found in re.findall(r"^EnvironmentFile=\S+$", unit.read_text(), flags=re.MULTILINE)
    }
    text = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8")
    beside = re.findall(r"^.*bin/duetime .*$", text, flags=re.MULTILINE)
    assert beside
    assert all(f" -p {secrets} " in each for each in beside)


def test_nothing_is_installed_from_an_index_that_does_not_have_it():
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        assert not re.search(r"pip install '?duetime", path.read_text(encoding="utf-8")), path


def objects():
    for path in MANIFESTS:
        yield from yaml.safe_load_all(path.read_text(encoding="utf-8"))


def pods():
    return [
        each["spec"]["template"]["spec"] for each in objects() if "template" in each.get("spec", {})
    ]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda each: each.name)
def test_a_manifest_fits_the_schemas_of_kubernetes(path):
    for each in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        # Strictly: a field that Kubernetes does not know is an error, and not left out.
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
        assert each["metadata"]["name"]


def test_the_docs_say_whose_schemas_those_are():
    text = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8")
    assert f"the schemas of Kubernetes {KUBERNETES} " in text


def test_pods_run_commands_and_mount_volumes_that_exist():
    commands = {each.callback.__name__ for each in app.registered_commands}
    for pod in pods():
        (container,) = pod["containers"]
        assert container["args"][0] in commands
        mounted = {each["name"] for each in container["volumeMounts"]}
        assert mounted - {"spool"} <= {each["name"] for each in pod["volumes"]}


def test_no_service_of_kubernetes_is_taken_for_a_setting():
    assert [pod["enableServiceLinks"] for pod in pods()] == [False] * len(pods())


def test_driver_on_kubernetes_has_properties_that_duetime_accepts():
    """`$(NAMESPACE)` is Kubernetes' own; executors reach the driver by its service."""
    (driver,) = (pod for pod in pods() if "--master" in pod["containers"][0]["args"])
    given = {each["name"]: each.get("value") for each in driver["containers"][0]["env"]}
    properties = json.loads(given["DUETIME_SPARK_PROPERTIES"])
    services = {each["metadata"]["name"]: each for each in objects() if each["kind"] == "Service"}
    ports = services[properties["spark.driver.host"]]["spec"]["ports"]
    ours = {properties["spark.driver.port"], properties["spark.driver.blockManager.port"]}
    assert {str(each["port"]) for each in ports} == ours
    assert not properties.keys() & REQUIRED_PROPERTIES.keys()


def test_entrypoint_starts_an_executor_as_spark_names_it(tmp_path):
    """Programs of its own in place of tini, Java and Python: they write their arguments."""
    for name in ("tini", "python"):
        program = tmp_path / name
        program.write_text('#!/bin/sh\n[ "$1" = -c ] && echo /spark || printf "%s\\n" "$@"\n')
        program.chmod(0o755)
    own = {f"SPARK_{name}": name.lower() for name in EXECUTOR_VARIABLES}
    own |= {f"SPARK_JAVA_OPT_{number}": f"-Dn={number} x" for number in range(11)}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.run(
        [ENTRYPOINT, "executor"], env=os.environ | own | path, check=True, stdout=subprocess.PIPE
    ).stdout.decode()
    words = said.splitlines()
    assert words[:3] == ["-s", "--", "java"]
    assert words[3:14] == [f"-Dn={number} x" for number in range(11)]
    assert ":/spark/jars/*" in words
    assert words[words.index("--driver-url") + 1] == "driver_url"
    assert words[words.index("--podName") + 1] == "executor_pod_name"
    said = subprocess.run(
        [ENTRYPOINT, "run"], env=os.environ | path, check=True, stdout=subprocess.PIPE
    ).stdout.decode()
    assert said.split() == ["--", "duetime", "run"]


def test_compose_file_has_settings_and_commands_that_exist():
    services = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    ours = {name: each for name, each in services.items() if each["image"] == "duetime"}
    commands = {each.callback.__name__ for each in app.registered_commands}
    for name in ("topics", "pipeline"):
        assert ours[name]["command"][0] in commands
        given = ours[name]["environment"]
        found = {key.removeprefix("DUETIME_").lower(): value for key, value in given.items()}
        found["spark_properties"] = json.loads(found["spark_properties"])
        Settings(**found)
    assert {each for one in services.values() for each in one.get("depends_on", ())} < {*services}
    # Executors reach the driver by its name.
    assert ours["pipeline"]["hostname"] == found["spark_properties"]["spark.driver.host"]
    assert ours["pipeline"]["command"][-1] == f"spark://{ours['spark-master']['hostname']}:7077"


def test_a_second_try_meets_the_process_that_had_the_first():
    (service,) = (
        each
        for each in objects()
        if each["kind"] == "Service" and each["spec"]["selector"]["part"] == "api"
    )
    assert service["spec"]["sessionAffinity"] == "ClientIP"


def test_the_configuration_in_the_manifests_is_one():
    (config,) = (each for each in objects() if each["kind"] == "ConfigMap")
    Settings(**tomllib.loads(config["data"]["duetime.toml"]))


def test_hadolint_finds_no_fault_with_the_dockerfile():
    hadolint = Path(sysconfig.get_path("scripts"), "hadolint")
    told = subprocess.run(
        [hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stdout + told.stderr) == (0, "")


def test_the_image_copies_what_is_there():
    text = DOCKERFILE.read_text(encoding="utf-8")
    copied = re.findall(r"^COPY (?!--from)(.+) \./?\S*$", text, flags=re.MULTILINE)
    for name in " ".join(copied).split():
        assert (ROOT / name).exists()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in re.search(r"\.\[([a-z,]+)\]", text).group(1).split(","):
        assert extra in extras["optional-dependencies"]
