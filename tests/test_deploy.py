"""What is in deploy/ speaks of what the code has. Nothing here is run but its linters.

A linter that is missing skips on a laptop and fails in CI.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from prometheus_client import REGISTRY

from duetime import metrics  # noqa: F401 (registers them)
from duetime.config import Settings

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DASHBOARD = DEPLOY / "grafana" / "duetime.json"
RULES = DEPLOY / "prometheus" / "duetime.rules.yml"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))

#: The release whose schemas the manifests fit; docs/deploying.md names it.
KUBERNETES = "1.37"

#: What the modules of the metrics export, by the names that Prometheus sees.
EXPORTED = {
    sample
    for family in REGISTRY.collect()
    for sample in (family.name, *(family.name + end for end in ("_total", "_count", "_bucket")))
    if family.name.startswith("duetime_")
}


TARGETS = [
    target
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    for target in panel["targets"]
]


def expressions():
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    yield from (rule["expr"] for group in rules["groups"] for rule in group["rules"])
    yield from (target["expr"] for target in TARGETS)


NAMED = {name for each in expressions() for name in re.findall(r"\bduetime_\w+", each)}


def test_every_metric_that_is_named_is_exported():
    assert NAMED <= EXPORTED


def test_every_metric_is_on_the_dashboard_and_in_the_docs():
    text = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    for family in REGISTRY.collect():
        if family.name.startswith("duetime_"):
            assert any(name.startswith(family.name) for name in NAMED), family.name
            assert f"`{family.name}" in text


@pytest.mark.parametrize("target", TARGETS, ids=lambda each: each["expr"])
def test_lines_of_a_panel_are_told_apart_by_their_legends(target):
    labels = {
        label
        for listed in re.findall(r"\bby \(([^)]*)\)", target["expr"])
        for label in listed.split(", ")
    }
    assert labels - {"le"} <= set(re.findall(r"{{(\w+)}}", target.get("legendFormat", "")))


def test_every_alert_says_what_to_do():
    text = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    alerts = re.findall(r"alert: (\w+)", RULES.read_text(encoding="utf-8"))
    assert alerts
    assert all(f"`{each}`" in text for each in alerts)


@pytest.fixture(scope="module")
def promtool():
    found = shutil.which("promtool")
    if found is None:
        assert not os.environ.get("CI")
        pytest.skip("there is no promtool (Debian: prometheus)")
    return found


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


@pytest.mark.parametrize("unit", sorted((DEPLOY / "systemd").iterdir()), ids=lambda each: each.name)
def test_systemd_accepts_the_unit(unit, tmp_path):
    systemd = shutil.which("systemd-analyze")
    if systemd is None:
        pytest.skip("there is no systemd-analyze")
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
    commands = {path.stem for path in (ROOT / "src/duetime/cli").glob("*.py")} | {"run"}
    for pod in pods():
        (container,) = pod["containers"]
        # A script is looked at by the next test.
        assert "command" in container or set(container["args"]) <= commands
        mounted = {each["name"] for each in container["volumeMounts"]}
        assert mounted - {"spool"} <= {each["name"] for each in pod["volumes"]}


def test_spark_is_given_what_there_is():
    (script,) = (
        pod["containers"][0]["args"][0] for pod in pods() if "command" in pod["containers"][0]
    )
    found, _, submit = script.partition("exec ")
    assert submit.startswith('"$spark/bin/spark-submit"')
    looked = 'test -x "$spark/bin/spark-submit" -a -f "$main" -a -f "${jars%%,*}" -a -n "$java"'
    own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run([shutil.which("bash"), "-euc", found + looked], check=True, env=os.environ | own)


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
