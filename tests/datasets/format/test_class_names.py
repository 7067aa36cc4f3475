"""A class is found by its number, its folder or wnid, and its name; ImageNet's names are shipped."""

from __future__ import annotations

import pytest

from leandit.datasets.errors import RecipeError
from leandit.datasets.format.class_names import ClassNames, imagenet_names


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


def test_a_name_of_several_classes_is_refused_with_all_of_them(imagenet: ClassNames) -> None:
    with pytest.raises(RecipeError, match=r"2 classes have this name: 134 is crane \(bird\).*517 is crane \(machine\)"):
        imagenet.find("crane")
    assert imagenet.find("crane (machine)") == 517


def test_an_unknown_class_is_refused_with_the_nearest(imagenet: ClassNames) -> None:
    with pytest.raises(RecipeError, match=r"no class 'golden retreiver'.*'golden retriever'.*1000 classes, 0 to 999"):
        imagenet.find("golden retreiver")
    for wanted in (1000, -1, "1000", True, "-1"):
        with pytest.raises(RecipeError, match="no class"):
            imagenet.find(wanted)


def test_an_unknown_class_of_a_few_is_refused_with_all_of_them() -> None:
    with pytest.raises(RecipeError, match=r"no class 'lion'\. There are 3 classes, 0 to 2: cat, dog, zebra\.$"):
        ClassNames(["cat", "dog", "zebra"]).find("lion")


def test_each_part_of_a_name_is_one_and_a_whole_name_comes_first() -> None:
    names = ClassNames(["a", "b"], ["tench, Tinca tinca", "Tinca Tinca"])
    assert (names.find("tench"), names.find("tinca tinca"), names.find("tench, tinca tinca")) == (0, 1, 0)


def test_a_folder_whose_name_is_a_number_counts_before_the_number() -> None:
    names = ClassNames(["7", "0", "cat"])
    assert (names.find("0"), names.find(0), names.find("2"), names.find("7")) == (1, 0, 2, 0)
    assert (names.describe(2), names.summary()) == ("cat", "3: 7 ... cat")


def test_a_store_without_classes_has_none() -> None:
    assert ClassNames(None).summary() == "none"
    with pytest.raises(RecipeError, match=r"no class 'cat'\. There are no classes"):
        ClassNames(None).find("cat")


def test_classes_that_are_not_all_of_imagenet_keep_their_own_names() -> None:
    assert ClassNames(["n01440764", "mine"]).names == ["n01440764", "mine"]
    assert ClassNames(["n01443537"]).names == ["goldfish"]
