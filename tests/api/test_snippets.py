"""The first request of docs/api.md, sent as it is written there."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


@pytest.mark.system
def test_the_first_request_is_answered_as_the_page_says(api):
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("there is no curl")
    text = PAGE.read_text(encoding="utf-8")
    (request,) = re.findall(r"^curl .*$", text, re.MULTILINE)
    (shown,) = re.findall(r'^\{"id".*$', text, re.MULTILINE)

    here = request.replace("127.0.0.1:8080", str(api.base_url).removeprefix("http://").rstrip("/"))
    said = subprocess.run(["/bin/bash", "-c", here], check=True, capture_output=True).stdout

    answer = json.loads(said)
    assert answer.keys() == json.loads(shown).keys()
    assert answer["id"].endswith("-order-17")
