"""The parts of a report: text that does no harm, charts and images inside the page, and the same bytes each time."""

from __future__ import annotations

import base64
import io

import jinja2
import numpy as np
import pytest
from html_elements import Elements
from markupsafe import Markup
from PIL import Image

from leandit.tools.inspection.report.charts import Curve, bar_chart, histogram, line_chart, short
from leandit.tools.inspection.report.page import (
    Alert,
    Section,
    environment,
    latent_pixels,
    render_page,
    thumbnail,
    webp_uri,
)

MARKUP = "<script>alert(1)</script><img src=x onerror=alert(2)>\" onload='alert(3)"
MARKS = "abc\u202edef\x1b[31m\u2066\x00\u05d0\u05d1"
ATTACKS = [MARKUP, MARKS, "]]></style><script>", "$\\frac{1}{$", "_underscore", "{{ 7 * 7 }}", "\ud7ff&amp;"]
NOISE = np.random.default_rng(0).integers(0, 256, (150, 150, 3), np.uint8)
SVG, WEBP = "data:image/svg+xml;base64,", "data:image/webp;base64,"
TEMPLATE = """
{% extends "page.html" %}
{% import "parts.html" as parts %}
{% block main %}
<section id="a">{{ parts.facts([(text, text), ("lines", [text, 3])]) }}{{ parts.table([text, "n"], [[text, 1]]) }}
{{ parts.gallery(pictures) }}{{ parts.folded(text, [text]) }}{{ parts.figure(chart, text) }}
<p title="{{ text }}">{{ text }}</p></section>
{% endblock %}
"""


def page_of(text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A page that shows a text in every way that a template can."""
    with_template = environment()
    assert with_template.loader
    with_template.loader = jinja2.ChoiceLoader([jinja2.DictLoader({"test.html": TEMPLATE}), with_template.loader])
    monkeypatch.setattr("leandit.tools.inspection.report.page.environment", lambda: with_template)
    chart = line_chart([Curve(text, [0, 1], [1, 2])], title=text, x_label=text, y_label=text, marks={text: [0.5]})
    chart += bar_chart([text, "b"], {text: [1, 2], "other": [2, 1]}, title=text, x_label=text, y_label=text)
    pictures = [thumbnail(NOISE, key=text, text=text), thumbnail(None, key=text, text=text)]
    alerts = [Alert(text, "a")]
    return render_page(
        "test.html", title=text, sections=[Section("a", text)], alerts=alerts, text=text, pictures=pictures, chart=chart
    )


def svgs(html: str) -> list[Elements]:
    """The elements of each chart of a page."""
    uris = [value for name, value in Elements(html).attributes if name == "src" and value.startswith(SVG)]
    return [Elements(base64.b64decode(uri.removeprefix(SVG), validate=True).decode()) for uri in uris]


@pytest.mark.parametrize("text", ATTACKS)
def test_a_text_makes_no_element_and_no_attribute(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harmless, attacked = Elements(page_of("harmless", monkeypatch)), Elements(page_of(text, monkeypatch))
    assert attacked.names == harmless.names
    assert [name for name, _ in attacked.attributes] == [name for name, _ in harmless.attributes]
    assert not {"script", "iframe", "object", "link", "base", "form"} & set(attacked.names)
    for chart in svgs(page_of(text, monkeypatch)):
        assert not {"script", "iframe", "image", "foreignobject", "a"} & set(chart.names)
        assert not [name for name, _ in chart.attributes if name.startswith("on")]


def test_control_characters_and_bidirectional_marks_are_shown_as_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    html = page_of(MARKS, monkeypatch)
    assert [c for c in html if not c.isprintable() and c not in "\n"] == []
    assert r"abc\u202edef\x1b[31m\u2066\x00" in html
    assert "\u05d0\u05d1</bdi>" in html  # letters of right-to-left writing stay letters, isolated


def test_a_page_asks_for_nothing_and_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    elements = Elements(page_of("harmless", monkeypatch))
    links = [value for name, value in elements.attributes if name in ("src", "href", "data", "action")]
    assert sorted({link.partition(",")[0] for link in links}) == ["#a", *sorted(x.rstrip(",") for x in (SVG, WEBP))]
    policy = [value for name, value in elements.attributes if name == "content"]
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in policy
    ids = [value for name, value in elements.attributes if name == "id"]
    assert sorted(set(ids)) == sorted(ids)


def test_a_template_prints_no_value_that_is_missing() -> None:
    with pytest.raises(jinja2.UndefinedError, match="runs"):
        render_page("run.html", title="t", sections=[])


def test_a_long_text_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    html = page_of("x" * 100_000, monkeypatch)
    assert "x" * 2001 not in html
    assert "(100,000 characters)" in html


def charts() -> list[Markup]:
    x = np.linspace(1, 1000, 500)
    root = Curve("root", x, x**0.5)
    labels = {"title": "t", "x_label": "step", "y_label": "loss"}
    return [
        line_chart(
            [root, Curve("raw", x, x, faint=True), Curve("c", x[::50], x[::50], dashed=True, dots=True)], **labels
        ),
        line_chart([root], log_y=True, expected=[1.0], marks={"restart": [3, 40]}, wide=True, **labels),
        bar_chart(["256x256", "512x512"], {"records": [3, 4]}, **labels),
        histogram([1, 2, 4, 8], {"a": [3, 4, 5], "b": [1, 2, 3]}, log_x=True, **labels),
        histogram(np.arange(4), {"a": [3, 4, 5]}, marks={"limit": [2]}, **labels),
    ]


def test_a_chart_is_an_image_with_the_names_of_its_axes_and_the_same_bytes_each_time() -> None:
    assert charts() == charts()
    for chart, legend in zip(charts(), [{"root", "c"}, {"restart"}, set(), {"a", "b"}, {"limit"}], strict=True):
        assert ("alt", "t") in Elements(chart).attributes
        (svg,) = svgs(chart)
        assert {"step", "loss"} | legend <= set(svg.text)
        assert "raw" not in svg.text
        assert len(chart) < 60_000


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (1500, "1,500"), (20_000, "20k"), (1_300_000, "1.3M"), (2.5e9, "2.5G"), (-1e6, "-1M")],
)
def test_numbers_of_an_axis_are_short(value: float, text: str) -> None:
    assert short(value) == text


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


@pytest.mark.parametrize("channels", [1, 2, 3, 16])
def test_a_latent_becomes_an_image_of_its_first_channels(channels: int) -> None:
    latent = np.random.default_rng(0).standard_normal((channels, 6, 5)).astype(np.float32)
    latent[0, 0, 0] = np.nan
    pixels = latent_pixels(latent)
    assert (pixels.shape, pixels.dtype) == ((6, 5, 3), np.uint8)
    for colour in range(3):
        channel = latent[min(colour, channels - 1)]
        seen = np.argsort(pixels[1:, :, colour].ravel(), kind="stable")
        assert np.all(np.diff(channel[1:].ravel()[seen][4:-4]) > -0.2)
        assert (pixels[:, :, colour].min(), pixels[:, :, colour].max()) == (0, 255)
