"""A class is found by its number, its folder or wnid, and its name; ImageNet's names are shipped."""

from __future__ import annotations

import pytest

from leandit.datasets.format.class_names import ClassNames, imagenet_names
from leandit.errors import RecipeError


@pytest.fixture(scope="module")
def imagenet() -> ClassNames:
    return ClassNames(list(imagenet_names()))


def test_the_shipped_names_are_imagenets_in_its_order(imagenet: ClassNames) -> None:
    assert len(imagenet) == 1000
    assert imagenet.classes == sorted(imagenet.classes)
    known = {0: "n01440764", 207: "n02099601", 388: "n02510455", 999: "n15075141"}  # as the published checkpoints
    assert {label: imagenet.classes[label] for label in known} == known
    assert imagenet.describe(207) == "golden retriever (n02099601)"
    assert imagenet.summary() == "1000: tench (n01440764) ... toilet tissue (n15075141)"


@pytest.mark.parametrize("wanted", [388, "388", "n02510455", "giant panda", "Giant_Panda"])
def test_a_class_is_found_by_number_wnid_and_name(imagenet: ClassNames, wanted: str | int) -> None:
    assert imagenet.find(wanted) == 388


def test_an_ambiguous_or_unknown_class_is_refused_with_those_that_may_be_meant(imagenet: ClassNames) -> None:
    with pytest.raises(RecipeError, match=r"2 classes have this name: 134 is crane \(bird\).*517 is crane \(machine\)"):
        imagenet.find("crane")
    assert imagenet.find("crane (machine)") == 517
    with pytest.raises(RecipeError, match=r"no class 'golden retreiver'.*'golden retriever'.*1000 classes, 0 to 999"):
        imagenet.find("golden retreiver")
    for wanted in (1000, -1, "1000", True):
        with pytest.raises(RecipeError, match="no class"):
            imagenet.find(wanted)
    with pytest.raises(RecipeError, match=r"no class 'lion'\. There are 3 classes, 0 to 2: cat, dog, zebra\.$"):
        ClassNames(["cat", "dog", "zebra"]).find("lion")
    with pytest.raises(RecipeError, match=r"no class 'cat'\. There are no classes"):
        ClassNames(None).find("cat")


def test_what_is_found_first_and_how_a_class_is_called() -> None:
    names = ClassNames(["a", "b"], ["tench, Tinca tinca", "Tinca Tinca"])  # a whole name comes first
    assert (names.find("tench"), names.find("tinca tinca"), names.find("tench, tinca tinca")) == (0, 1, 0)
    names = ClassNames(["7", "0", "cat"])  # a folder whose name is a number counts before the number
    assert (names.find("0"), names.find(0), names.find("2"), names.find("7")) == (1, 0, 2, 0)
    assert (names.describe(2), names.summary()) == ("cat", "3: 7 ... cat")
    assert ClassNames(None).summary() == "none"
    assert ClassNames(["n01440764", "mine"]).names == ["n01440764", "mine"]  # not all are of ImageNet
    assert ClassNames(["n01443537"]).names == ["goldfish"]
