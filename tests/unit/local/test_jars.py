import re
import shutil
from pathlib import Path

import pyspark
import pytest

from duetime.core.errors import SetupError
from duetime.local import jars
from duetime.local.jars import find_java

#: Java options under which no repository can be reached, and none was before.
OFFLINE = (
    "-Duser.home={home} -Dhttp.proxyHost=127.0.0.1 -Dhttp.proxyPort=1 "
    "-Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort=1"
)


@pytest.fixture
def no_jars(tmp_path, monkeypatch):
    """A machine on which nothing was fetched yet."""
    place = tmp_path / "cache" / "jars"
    monkeypatch.setenv("DUETIME_JARS", str(place))
    return place


def java_that_says(words: str, home: Path) -> None:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho '{words}' >&2\n")
    java.chmod(0o755)


def names(paths: list[Path]) -> set[str]:
    return {path.name.rsplit("-", 1)[0] for path in paths}


def test_the_pipeline_gets_the_connector_and_nothing_that_pyspark_ships():
    shipped = {jar.name for jar in Path(pyspark.__file__).parent.glob("jars/*.jar")}
    ours = {jar.name for jar in jars.pipeline_jars()}
    assert any(name.startswith("spark-sql-kafka-0-10_2.13-") for name in ours)
    assert any(name.startswith("kafka-clients-") for name in ours)
    assert any(name.startswith("jna-") for name in ours)
    assert len(ours) == 5
    assert not ours & shipped


def test_the_broker_gets_kafka_and_the_bridge_to_its_log():
    assert {"kafka_2.13", "kafka-server", "log4j-core", "log4j-slf4j-impl"} <= names(
        jars.broker_jars()
    )


def test_the_connector_is_of_pysparks_release():
    connector = re.search(r'name="spark-sql-kafka-0-10_2.13" rev="(.+?)"', jars.IVY_XML.read_text())
    assert connector is not None
    assert connector[1] == pyspark.__version__


def test_the_directory_changes_with_the_list_of_jars(tmp_path, monkeypatch):
    monkeypatch.delenv("DUETIME_JARS", raising=False)
    before = jars.jars_dir()
    changed = tmp_path / "ivy.xml"
    changed.write_text("another list")
    monkeypatch.setattr(jars, "IVY_XML", changed)
    assert jars.jars_dir().parent == before.parent
    assert jars.jars_dir() != before


def test_jars_that_are_here_need_neither_java_nor_network(monkeypatch):
    jars.ensure_jars()
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    jars.ensure_jars()


def test_a_failed_download_says_what_to_do_and_leaves_nothing(no_jars, tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", OFFLINE.format(home=tmp_path))
    with pytest.raises(SetupError, match=r"could not be downloaded .* check the network"):
        jars.ensure_jars()
    assert {path.name for path in no_jars.parent.iterdir()} == {".lock", "fetch.log"}


def test_files_of_others_are_not_replaced(no_jars, monkeypatch):
    no_jars.mkdir(parents=True)
    (no_jars / "letter.txt").write_text("keep me")
    monkeypatch.setattr(jars, "_retrieve", lambda *_: None)
    with pytest.raises(SetupError, match="empty it"):
        jars.ensure_jars()
    assert (no_jars / "letter.txt").read_text() == "keep me"


@pytest.mark.usefixtures("no_jars")
def test_a_full_disk_is_told_before_the_download(monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1024 * 1024)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(SetupError, match="only 1 MiB are free on the disk"):
        jars.ensure_jars()


def test_a_machine_without_java_is_told_to_install_it(tmp_path, monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match="Java is missing: install Java 17 or newer"):
        find_java()


def test_a_java_home_without_java_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SetupError, match=f"JAVA_HOME is {tmp_path}, but there is no Java"):
        find_java()


@pytest.mark.parametrize(
    ("words", "version"), [('java version "1.8.0_392"', 1), ('openjdk version "11.0.2"', 11)]
)
def test_an_old_java_is_refused(words, version, tmp_path, monkeypatch):
    java_that_says(words, tmp_path)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SetupError, match=f"is Java {version}, which is too old"):
        find_java()


@pytest.mark.parametrize("words", ['openjdk version "17.0.15"', 'openjdk version "25"'])
def test_a_new_java_is_taken(words, tmp_path, monkeypatch):
    java_that_says(words, tmp_path)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert find_java() == tmp_path / "bin" / "java"


def test_a_program_that_is_no_java_is_told_apart(tmp_path, monkeypatch):
    java_that_says("Unable to locate a Java Runtime.", tmp_path)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SetupError, match="prints no version"):
        find_java()


@pytest.mark.usefixtures("no_jars")
def test_the_command_ends_with_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert jars.main() == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
