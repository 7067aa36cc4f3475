"""The pages of a store: what they show, what they escape, who may ask, and that nothing is written."""

from __future__ import annotations

import gc
import io
import re
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from threading import Event, get_ident
from time import sleep
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from forked import ForkedPython
from hub_server import Hub
from making import no_progress, tree_digest
from PIL import Image
from stores import Everything
from view_sites import CONTROL, MARKUP, RIGHT_TO_LEFT, ROOT, TOKEN, client, grey, hostile_store, site

from leandit.datasets.store import LatentStore
from leandit.errors import EncoderError
from leandit.tools.export.publish import publish
from leandit.tools.inspection.view import images, server, store_site, tables


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> LatentStore:
    return hostile_store(tmp_path_factory.mktemp("hostile"))


LONG = f"record/{'9' * 5000}"  # Python refuses to parse so many digits
WEBSOCKET = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13", "sec-websocket-key": "a"}


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))


def pixels_of(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)))


@pytest.mark.parametrize("path", ["/", "/?q=red", "/?page=x", "/record/0", "/image/0", "/nothing", "/static/view.js"])
def test_every_answer_has_the_headers_that_forbid_the_rest(path: str, label_store: LatentStore) -> None:
    with client(site(label_store)) as web:
        headers = web.get(ROOT + path).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy.pop("default-src") == "'none'"
    own, nobody = {"script-src", "style-src", "img-src", "connect-src"}, {"base-uri", "form-action", "frame-ancestors"}
    assert policy == dict.fromkeys(own, "'self'") | dict.fromkeys(nobody, "'none'")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "path", ["/", "/record/0", f"/{TOKEN}", f"/{TOKEN}x/", f"/{TOKEN[1:]}/", f"//{TOKEN}/", "/static/view.css"]
)
def test_without_the_token_there_is_nothing(path: str, label_store: LatentStore) -> None:
    with client(site(label_store)) as web:
        answer = web.get(f"http://127.0.0.1{path}")
    assert answer.status_code == 404
    assert str(label_store.path) not in answer.text
    assert "content-security-policy" in answer.headers


def test_only_names_of_this_machine_are_answered_and_nothing_can_be_sent(label_store: LatentStore) -> None:
    ours, others = ("127.0.0.1", "127.0.0.1:8080", "localhost:1"), ("evil.example", "127.0.0.1.evil.example")
    with client(site(label_store)) as web:
        for host in (*ours, *others, "evil@127.0.0.1", "[::1", "0.0.0.0"):
            status = 200 if host in ours else 400
            assert web.get(ROOT + "/", headers={"host": host}).status_code == status
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert web.request(method, ROOT + "/").status_code == 405


def test_texts_of_a_store_are_texts(hostile: LatentStore) -> None:
    paths = ("", "record/0", "record/1", "record/2", "?status=rejected")
    with client(site(hostile)) as web:
        pages = [web.get(f"{ROOT}/{path}").text for path in paths]
        typed = web.get(ROOT + "/", params={"q": '"><script>x</script>'}).text
    assert 'name="q" value="&#34;&gt;&lt;script&gt;x&lt;/script&gt;"' in typed
    for page in pages:
        assert len(re.findall("<script", page)) == 1  # our own
        assert "<b>" not in page
        assert not re.search("[\u0000-\u0008\u000b-\u001f\u202a-\u202e\u2066-\u2069]", page)
        assert not re.search(r"\son\w+=", re.sub("<bdi>.*?</bdi>", "", page))
        assert " style=" not in page
    assert "<bdi>&lt;script&gt;alert(1)&lt;/script&gt;" in pages[0]
    assert r"<bdi>a bell\x07, an escape\x1b[31m" in pages[2]
    assert r"<bdi>user\u202egnp.exe\u2066" in pages[3]
    assert "&lt;b&gt;gone.png" in pages[4]
    assert {MARKUP, CONTROL, RIGHT_TO_LEFT} <= set(hostile.captions["text"].to_pylist())


def test_a_page_shows_24_records_and_leads_on(label_store: LatentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tables.PAGE == 24
    for module in (tables, store_site):
        monkeypatch.setattr(module, "PAGE", 6)
    with client(site(label_store)) as web:
        first, last = (web.get(f"{ROOT}/{query}").text for query in ("?q=n0", "?q=n0&page=3"))
        beyond = web.get(f"{ROOT}/?page=4")
    assert len(re.findall('class="card"', first)) == 6
    assert len(re.findall('class="card"', last)) == 3
    assert 'href="?q=n0&amp;page=2" rel="next"' in first
    assert 'rel="next"' not in last
    assert 'href="?q=n0&amp;page=2" rel="prev"' in last
    assert "15 of 15 records, showing 13-15" in text_of(last)
    assert beyond.status_code == 400
    assert "page 4: the last one is 3." in beyond.text
    assert "No records found" not in beyond.text


def test_a_record_says_where_its_bytes_lie_and_if_they_changed(caption_store: LatentStore, tmp_path: Path) -> None:
    store = LatentStore(shutil.copytree(caption_store.path, tmp_path / "store"))
    record = store.record_at(4)
    path, offset, length = store.latents(record.bucket or "").place(record.row)
    content = bytearray((store.path / path).read_bytes())
    assert content[offset : offset + length] == store.latents(record.bucket or "")[record.row].tobytes()
    before = tree_digest(store.path)
    with client(site(store)) as web:
        page = web.get(ROOT + "/record/4").text
        for other in ("", "image/3", "channel/3/0", "?q=red&sort=key"):
            assert web.get(f"{ROOT}/{other}").status_code == 200
    assert tree_digest(store.path) == before
    texts = [store.captions["text"][number].as_py() for number in record.caption_ids]
    numbers = f"{offset:,}", f"{length:,}", f"{store.checksums()[4]:016x}"
    assert [shown for shown in (path, *numbers, *texts, *store.records.column_names) if shown not in page] == []
    assert "matches" in text_of(page)
    content[offset] ^= 1
    (store.path / path).write_bytes(content)
    with client(site(LatentStore(store.path))) as web:
        assert "differs" in text_of(web.get(ROOT + "/record/4").text)


def test_images_of_a_record_are_images_and_rows_of_later_revisions_are_found(everything: Everything) -> None:
    store = LatentStore(everything.added)
    with client(site(store)) as web:
        page = web.get(ROOT + "/record/0").text
        addresses = re.findall('<img src="([^"]+)"', page)
        kinds = {address.split("/")[2] for address in addresses}
        assert {"image", "channel", "feature"} <= kinds
        for address in addresses:
            answer = web.get(address.replace("&amp;", "&"))
            assert answer.headers["content-type"] == "image/webp"
            assert pixels_of(answer.content).shape[2] == 3
        revisions = store.records["revision"].to_pylist()
        assert len(set(revisions)) > 1
        for position in map(revisions.index, set(revisions)):
            page = text_of(web.get(f"{ROOT}/record/{position}").text)
            assert "matches" in page
            assert "differs" not in page


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (EncoderError("vae.model 'far/away': not a folder here."), "vae.model 'far/away': not a folder here."),
        (KeyError("conv_in.weight"), "the decoder cannot be loaded (KeyError: 'conv_in.weight')."),
    ],
)
def test_without_a_decoder_an_image_is_its_latent(
    error: Exception, note: str, label_store: LatentStore, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> Any:
        raise error

    with client(site(label_store, load)) as web:
        image = web.get(ROOT + "/image/0")
        assert image.status_code == 200
        assert web.get(ROOT + "/status").json()["note"] == note
        assert "no decoder" in text_of(web.get(ROOT + "/").text)
    assert len(np.unique(pixels_of(image.content))) > 10
    gc.collect()
    assert not caplog.records  # asyncio would log a traceback for each request


def test_what_is_not_there_is_said(hostile: LatentStore) -> None:
    rejected = hostile.records["status"].to_pylist().index("rejected")
    with client(site(hostile)) as web:
        for path in ("record/99", "image/99", f"image/{rejected}", f"channel/{rejected}/0", "channel/0/99", LONG):
            answer = web.get(f"{ROOT}/{path}")
            assert answer.status_code == 404, path
            assert 'role="alert"' in answer.text
        assert web.get(f"{ROOT}/feature/0/none").status_code == 404
        assert "the metadata names a file that does not exist" in web.get(f"{ROOT}/record/{rejected}").text


def test_an_image_is_decoded_once_and_a_bad_row_does_not_spoil_others(label_store: LatentStore) -> None:
    threads: list[int] = []

    def decode(rows: np.ndarray) -> np.ndarray:
        threads.append(get_ident())
        if (rows[0] == bad).all():
            raise RuntimeError("a kernel has failed")
        return grey(rows)

    record = label_store.record_at(1)
    bad = label_store.latents(record.bucket or "")[record.row]
    with client(site(label_store, lambda: decode)) as web:
        answers = [web.get(f"{ROOT}/image/{number}") for number in (0, 0, 1, 2)]
    assert [answer.status_code for answer in answers] == [200, 200, 500, 200]
    assert answers[0].content == answers[1].content
    assert "the image cannot be decoded (RuntimeError: a kernel has failed)" in answers[2].text
    assert len(threads) == 3
    assert len(set(threads)) == 1


def test_too_many_waiting_requests_are_refused(label_store: LatentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_WAITING", 3)
    is_decoding, is_refused = Event(), Event()

    def decode(rows: np.ndarray) -> np.ndarray:
        is_decoding.set()
        assert is_refused.wait(60)
        return grey(rows)

    with client(site(label_store, lambda: decode)) as web, ThreadPoolExecutor(7) as threads:
        requests = [threads.submit(web.get, f"{ROOT}/image/{number}") for number in range(7)]
        assert is_decoding.wait(60)
        while sum(request.done() for request in requests) < 4:
            sleep(0.01)
        is_refused.set()
        answers = [request.result() for request in requests]
        assert web.get(f"{ROOT}/image/6").status_code == 200
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [503] * 4
    assert {answer.headers.get("retry-after") for answer in answers if answer.status_code == 503} == {"1"}


def test_a_store_that_is_removed_while_it_is_shown_is_said(label_store: LatentStore, tmp_path: Path) -> None:
    store = LatentStore(shutil.copytree(label_store.path, tmp_path / "store"))
    with client(site(store)) as web:
        shutil.rmtree(store.path)
        for path in ("image/0", "channel/0/0", "record/0"):
            assert 'role="alert"' in web.get(f"{ROOT}/{path}").text, path


WITH_HUB = """
import sys, pytest
from hub_server import use_hub
from leandit.tools.cli.main import main
use_hub(sys.argv.pop(1), pytest.MonkeyPatch())
main()
"""


def test_a_store_on_the_hub_is_shown(label_store: LatentStore, hub: Hub) -> None:
    url = "hf://datasets/somebody/shown"
    publish(label_store.path, url, no_progress, private=True, licence="mit", encoder_licence="mit")
    command = ["-c", WITH_HUB, hub.url, "view", url, "--no-open"]
    with ForkedPython(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as view:
        line = view.stdout.readline()
        view.send_signal(signal.SIGINT)
        error = view.communicate(timeout=240)[1]
    assert line.startswith("view  "), error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_page_refuses_websockets_and_a_signal_ends_it(number: signal.Signals, label_store: LatentStore) -> None:
    command = ["-c", "from leandit.tools.cli.main import main; main()", "view", label_store.path, "--no-open"]
    with ForkedPython(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            place = urlsplit(process.stdout.readline().split()[1])
            for path, headers, status in (("", {}, 200), (LONG, {}, 404), ("", WEBSOCKET, 400)):
                connection = HTTPConnection(str(place.hostname), place.port, timeout=240)
                connection.request("GET", place.path + path, headers=headers)
                assert connection.getresponse().status == status
                connection.close()
            process.send_signal(number)
            _, err = process.communicate(timeout=240)
        finally:
            process.kill()
    assert (process.returncode, err) == (0, "leandit: Ctrl-C ends it\n")


FEW_DESCRIPTORS = """
import os, resource
from leandit.tools.cli.main import main
descriptor = os.dup(0)
os.close(descriptor)
resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor + 40, descriptor + 40))
main()
"""
OUT_OF_DESCRIPTORS = (
    "leandit: view: Too many open files, so some requests are not answered. Raise the limit of open files "
    "('ulimit -n'), or close other programs.\n"
)


def test_a_page_that_is_out_of_descriptors_says_so_once_and_answers_again(label_store: LatentStore) -> None:
    command = ["-c", FEW_DESCRIPTORS, "view", label_store.path, "--no-open"]
    with ForkedPython(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            place = urlsplit(process.stdout.readline().split()[1])
            connections = []
            for _ in range(80):
                connection = HTTPConnection(str(place.hostname), place.port, timeout=240)
                connection.request("GET", place.path)
                connections.append(connection)
            said = [process.stderr.readline(), process.stderr.readline()]
            for connection in connections:
                connection.close()
            connection = HTTPConnection(str(place.hostname), place.port, timeout=240)
            connection.request("GET", place.path)
            assert connection.getresponse().status == 200
            connection.close()
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=240)
        finally:
            process.kill()
    ours = [line for line in err.splitlines() if "/proc/cpuinfo" not in line]  # torch may look at it just then
    assert (process.returncode, said, ours) == (0, ["leandit: Ctrl-C ends it\n", OUT_OF_DESCRIPTORS], [])


SLOW_DECODER = """
import time
from types import SimpleNamespace
from leandit.tools.cli.main import main
from leandit.tools.inspection.images import LatentDecoder
def decode(rows):
    print("decoding", flush=True)
    time.sleep(300)
LatentDecoder.of_store = classmethod(lambda *_: SimpleNamespace(decode_rows=decode))
main()
"""


def test_a_signal_ends_it_while_an_image_is_decoded(label_store: LatentStore) -> None:
    command = ["-c", SLOW_DECODER, "view", label_store.path, "--no-open"]
    with ForkedPython(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            place = urlsplit(process.stdout.readline().split()[1])
            connection = HTTPConnection(str(place.hostname), place.port, timeout=240)
            connection.request("GET", f"{place.path}image/0")
            assert process.stdout.readline() == "decoding\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=240) == 0
            connection.close()
        finally:
            process.kill()


# Every user of the machine can read the arguments of a process.
def test_no_argument_of_the_browser_is_the_token(monkeypatch: pytest.MonkeyPatch, label_store: LatentStore) -> None:
    opened, said, is_open = [], [], Event()

    def open_page(address: str) -> None:
        path = Path(address.removeprefix("file://"))
        opened.extend([address, path.read_text(), path.parent.stat().st_mode & 0o777])
        is_open.set()

    monkeypatch.setattr(server.webbrowser, "open", open_page)
    monkeypatch.setattr(server, "_has_display", lambda: True)
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: is_open.wait(60))
    server.serve(site(label_store), port=0, open_browser=True, say=said.append, warn=said.append)
    (address,), (file, page, mode) = said, opened
    assert urlsplit(address).path.strip("/") not in file
    assert (address in page, mode) == (True, 0o700)
    assert not Path(file.removeprefix("file://")).exists()
