"""The first request of docs/api.md, sent as it is written there, and its client."""

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

from tests.support.servers import program
from tests.support.snippets import ROOT, of, run
from tests.support.topics import taken_in

from duetime.core.messages import MessageId

PAGE = ROOT / "docs" / "api.md"


def test_the_first_request_is_answered_as_the_page_says(api):
    program("curl", "curl")
    text = PAGE.read_text(encoding="utf-8")
    (request,) = re.findall(r"^curl .* -d .*$", text, re.MULTILINE)
    (shown,) = re.findall(r'^\{"id".*$', text, re.MULTILINE)

    here = request.replace("127.0.0.1:8080", str(api.base_url).removeprefix("http://").rstrip("/"))
    said = subprocess.run(["/bin/bash", "-c", here], check=True, capture_output=True).stdout

    answer = json.loads(said)
    assert answer.keys() == json.loads(shown).keys()
    assert answer["id"].endswith("-order-17")


def test_the_client_schedules_cancels_and_lists(api, settings, wheel, now_ms, capfd):
    (client,) = of("python", page="api.md")
    other = wheel.message("orders", now_ms + 900_000)

    def pipeline():
        """Takes in what is scheduled, and its cancel."""
        (record,) = taken_in(settings, 1)
        headers = {name: value.decode() for name, value in record.headers()}
        due_ms, unique = int(headers["due-at-ms"]), headers["due-id"]
        assert (headers["due-topic"], record.key()) == ("orders", b"17")
        wheel.cancel(wheel.message("orders", due_ms, unique=unique))
        return MessageId(due_ms=due_ms, unique=unique)

    # A busy machine is given more than 10 s.
    own = {"http://127.0.0.1:8080": str(api.base_url), "seconds=10": "minutes=10"}
    with ThreadPoolExecutor(1) as pool:
        piped = pool.submit(pipeline)
        message = run(client, own)["message"]

        assert message.id == str(piped.result())
    (listed,) = capfd.readouterr().out.splitlines()
    assert listed.startswith(f"{other} ")
