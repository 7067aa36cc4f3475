"""The parts of a report: text that does no harm, charts and images inside the page, and the same bytes each time."""

from __future__ import annotations

import base64
import io
from typing import Any

import jinja2
import numpy as np
import pytest
from PIL import Image
from view_sites import Elements

from leandit.tools.inspection.report.charts import Chart, bar_chart, chart, histogram, label
from leandit.tools.inspection.report.page import latent_pixels, render_page, thumbnail, webp_uri
from leandit.tools.inspection.report.rules import Alert
from leandit.tools.inspection.templating import environment, rows_of
from leandit.tools.terminal.text import printable

MARKUP = "<script>alert(1)</script><img src=x onerror=alert(2)>\" onload='alert(3)"
MARKS = "abc\u202edef\x1b[31m\u2066\x00\u05d0\u05d1"
ATTACKS = [MARKUP, MARKS, "]]></style><script>", "$\\frac{1}{$", "_underscore", "{{ 7 * 7 }}", "\ud7ff&amp;"]
NOISE = np.random.default_rng(0).integers(0, 256, (150, 150, 3), np.uint8)
SVG, WEBP = "data:image/svg+xml;base64,", "data:image/webp;base64,"
TEMPLATE = """
{% extends "page.html" %}
{% import "parts.html" as parts %}
{% block main %}
<section id="a">{{ parts.facts({text: [text, 3]}) }}{{ parts.tile(text, text) }}
{% call parts.table([text]) %}<tr><td>{{ text | isolated }}</td></tr>{% endcall %}
{{ parts.gallery(images) }}{{ parts.folded(text, [text]) }}{{ parts.plots(charts) }}
<p title="{{ text }}">{{ text }}</p></section>
{% endblock %}
"""


def page_of(text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A page that shows a text in every way that a template can."""
    with_template = environment()
    with_template.loader = jinja2.ChoiceLoader([jinja2.DictLoader({"test.html": TEMPLATE}), with_template.loader])
    monkeypatch.setattr("leandit.tools.inspection.report.page.environment", lambda: with_template)
    charts = [
        chart(text, text, text, lambda axes: axes.plot([0, 1], [1, 2], label=label(text))),
        bar_chart(text, text, text, [text, "b"], [1, 2]),
    ]
    images = [thumbnail(NOISE, key=text, text=text), thumbnail(None, key=text, text=text)]
    values = {"text": text, "images": images, "charts": charts}
    return render_page("test.html", title=text, sections={"a": text}, alerts=[Alert(text, "a")], **values)


def svgs(html: str) -> list[Elements]:
    """The elements of each chart of a page."""
    uris = [value for name, value in Elements(html).attributes if name == "src" and value.startswith(SVG)]
    return [Elements(base64.b64decode(uri.removeprefix(SVG), validate=True).decode()) for uri in uris]


@pytest.mark.parametrize("text", ATTACKS)
def test_a_text_makes_no_element_and_no_attribute(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = page_of(text, monkeypatch)
    harmless, attacked = Elements(page_of("harmless", monkeypatch)), Elements(page)
    assert attacked.names == harmless.names
    assert [name for name, _ in attacked.attributes] == [name for name, _ in harmless.attributes]
    assert not {"script", "iframe", "object", "link", "base", "form"} & set(attacked.names)
    for svg in svgs(page):
        assert not {"script", "iframe", "image", "foreignobject", "a"} & set(svg.names)
        assert not [name for name, _ in svg.attributes if name.startswith("on")]


def test_control_characters_are_shown_as_escapes_and_a_page_forbids_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = [value for name, value in Elements(page_of("harmless", monkeypatch)).attributes if name == "content"]
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in policy
    html = page_of(MARKS, monkeypatch)
    assert [c for c in html if not c.isprintable() and c not in "\n"] == []
    assert r"abc\u202edef\x1b[31m\u2066\x00" in html
    assert "\u05d0\u05d1</bdi>" in html  # letters of right-to-left writing stay letters, isolated
    html = page_of("x" * 100_000, monkeypatch)
    assert "x" * 2001 not in html
    assert "(100,000 characters)" in html


@pytest.mark.parametrize("text", [MARKS, "\n= records\nrecords: 9", "a\n  b", "\u2028= x"])
def test_a_value_of_a_text_template_makes_no_row(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "= one\nname: {{ text }}\n  {{ text }}\n{% if text %}\nlast: {{ 7 }}\n{% endif %}"
    templates = environment(html=False)
    templates.loader = jinja2.DictLoader({"rows.txt": template})
    monkeypatch.setattr("leandit.tools.inspection.templating.environment", lambda **_: templates)
    assert rows_of("rows.txt", text=text) == {"one": {"name": [printable(text)] * 2, "last": ["7"]}}


def charts() -> list[Chart]:
    def draw(axes: Any) -> None:
        axes.plot([1, 1000], [1, 30], label="root")
        axes.set_yscale("log")

    return [
        chart("t", "step", "loss", draw, wide=True),
        bar_chart("t", "step", "loss", ["256x256", "512x512"], [3, 4]),
        histogram("t", "step", "loss", np.array([1, 2, 4]), np.arange(2), log_x=True),
        histogram("t", "step", "loss", np.arange(4), np.arange(3), limit=2),
    ]


def test_a_chart_is_an_image_with_the_names_of_its_axes_and_the_same_bytes_each_time() -> None:
    first = charts()
    assert charts() == first
    for made, legend in zip(first, [{"root"}, set(), set(), {"cut at"}], strict=True):
        assert ("alt", "t") in Elements(made.image).attributes
        (svg,) = svgs(made.image)
        assert {"step", "loss"} | legend <= set(svg.text)
        assert len(made.image) < 60_000


def test_an_image_is_a_small_webp_of_its_own_shape() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (600, 300, 3), np.uint8)
    uri = webp_uri(pixels, side_px=200)
    image = Image.open(io.BytesIO(base64.b64decode(uri.removeprefix(WEBP), validate=True)))
    assert (image.format, image.size) == ("WEBP", (100, 200))
    assert np.asarray(image).std() > 10
    for most_bytes in (len(uri) // 2, 2000, 300):  # a lower quality, then fewer pixels
        assert len(webp_uri(pixels, side_px=200, most_bytes=most_bytes)) <= most_bytes
    small = thumbnail(np.zeros((8, 12, 3), np.uint8), key="k", text="t")
    assert (small.width_px, small.height_px, small.is_coarse) == (12, 8, True)
    assert thumbnail(None).uri is None


@pytest.mark.parametrize("channels", [1, 3, 16])
def test_a_latent_becomes_an_image_of_its_first_channels(channels: int) -> None:
    latent = np.arange(channels * 30, dtype=np.float32).reshape(channels, 6, 5)
    latent[0, 0, 0] = np.nan
    pixels = latent_pixels(latent)
    assert (pixels.shape, pixels.dtype, pixels.min(), pixels.max()) == ((6, 5, 3), np.uint8, 0, 255)
    assert np.all(np.diff(pixels.reshape(-1, 3)[1:].astype(int), axis=0) >= 0)
