"""Archives of what Java loads: named for what fits, written once, and used from then on."""

import pytest

from duetime.local.jars import ClassArchive, find_java, spark_archive
from duetime.pipeline import class_archive


@pytest.fixture(autouse=True)
def jars(tmp_path, monkeypatch):
    monkeypatch.setenv("DUETIME_JARS", str(tmp_path))
    return tmp_path


def test_written_archive_is_used_from_then_on(jars, tmp_path):
    draft = tmp_path / "draft.jsa"
    archive = ClassArchive(find_java(), program="p")
    assert archive.read_options() == []
    assert archive.options(draft)[0] == f"-XX:ArchiveClassesAtExit={draft}"
    archive.keep(draft)
    assert not archive.exists
    draft.write_text("classes")
    archive.keep(draft)
    (kept,) = jars.glob("p-*.jsa")
    assert archive.options(draft) == archive.read_options()
    assert archive.options(draft)[0] == f"-XX:SharedArchiveFile={kept}"


def test_unfinished_draft_is_removed(tmp_path):
    draft = tmp_path / "draft.jsa"
    draft.write_text("half of it")
    ClassArchive(find_java()).options(draft)
    assert not draft.exists()


def test_two_installations_of_spark_have_an_archive_each(tmp_path, monkeypatch):
    draft = tmp_path / "draft.jsa"
    names = set()
    for place in ("a", "b"):
        monkeypatch.setattr("duetime.local.jars.find_spec", lambda _, at=place: Spec(f"{at}/x"))
        draft.write_text(place)
        archive = spark_archive()
        archive.keep(draft)
        names |= {each.name for each in tmp_path.glob("spark-*.jsa")}
    assert len(names) == 2


class Spec:
    """What is looked at of a module's."""

    def __init__(self, origin):
        self.origin = origin


def test_jars_that_are_installed_anew_have_an_archive_of_their_own(tmp_path, monkeypatch):
    jar = tmp_path / "jars" / "spark.jar"
    jar.parent.mkdir()
    monkeypatch.setattr("duetime.local.jars.find_spec", lambda _: Spec(tmp_path / "x"))
    draft = tmp_path / "draft.jsa"
    for content in ("", "more"):
        jar.write_text(content)
        archive = spark_archive()
        assert not archive.exists
        draft.write_text("classes")
        archive.keep(draft)
    archive.remove_others()
    assert len(list(tmp_path.glob("spark-*.jsa"))) == 1
    assert archive.exists


def test_existing_archive_is_not_trained_again(monkeypatch, capsys, tmp_path):
    draft = tmp_path / "draft.jsa"
    draft.write_text("classes")
    spark_archive().keep(draft)
    monkeypatch.setattr(class_archive, "write_archive", None)
    class_archive.main()
    assert capsys.readouterr() == ("", "")


def test_failed_training_prints_one_line_and_does_not_fail(monkeypatch, capsys):
    def fail(_archive, _directory):
        raise OSError("no room")

    monkeypatch.setattr(class_archive, "write_archive", fail)
    class_archive.main()
    assert capsys.readouterr().out.splitlines()[1:] == [
        "duetime: Spark will start some seconds later than it could: no room"
    ]
