"""Groups are never torn apart; scikit-learn's splitters for groups say how even a split can be."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.model_selection import GroupShuffleSplit, StratifiedGroupKFold

from vitlab.errors import DataError, UsageError
from vitlab.images.datasets import FileOptions, open_data
from vitlab.images.sources.dataset import ArrayDataset, Captioned, Captions, FileDataset, relabelled, subset
from vitlab.images.sources.splits import few_labels, group_folds, group_split
from vitlab.training.probe import FOLDS, deal, fit_probe

RANDOM = np.random.default_rng(0)


def patients(seed, count=60, classes=3):
    """Groups of 1 to 12 images, most of them of one class."""
    random = np.random.default_rng(seed)
    groups = np.repeat(np.arange(count), random.integers(1, 13, count))
    main = random.integers(0, classes, count)[groups]
    labels = np.where(random.random(len(groups)) < 0.85, main, random.integers(0, classes, len(groups)))
    order = random.permutation(len(groups))
    return labels[order], groups[order]


def unevenness(labels, part, share):
    """The largest difference between a class's share in this part and the one it should have."""
    return max(abs((labels[part] == k).sum() / (labels == k).sum() - share) for k in np.unique(labels))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.1, 0.25])
def test_a_split_keeps_groups_together_and_classes_as_even_as_scikit_learn_does(seed, share):
    labels, groups = patients(seed)
    train, val = group_split(labels, groups, (1 - share, share), seed)
    assert sorted([*train, *val]) == list(range(len(labels)))
    assert not set(groups[train]) & set(groups[val])
    assert set(labels[train]) == set(labels[val]) == set(labels)
    assert abs(len(val) / len(labels) - share) < 0.03
    at_random = GroupShuffleSplit(1, test_size=share, random_state=seed).split(labels, groups=groups)
    folds = StratifiedGroupKFold(round(1 / share), shuffle=True, random_state=seed).split(labels, labels, groups)
    theirs = min(unevenness(labels, part, share) for _, part in [*at_random, *folds])
    assert unevenness(labels, val, share) < max(0.05, theirs + 0.02)


def test_a_split_is_a_function_of_the_seed():
    labels, groups = patients(0)
    one, again, other = (group_split(labels, groups, (0.8, 0.2), seed)[1] for seed in (1, 1, 2))
    assert np.array_equal(one, again) and not np.array_equal(one, other)


def test_a_class_of_one_group_is_trained_on():
    labels = np.array([0] * 8 + [1] * 8 + [2] * 4)
    groups = np.array([0] * 4 + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4)
    train, val = group_split(labels, groups, (0.5, 0.5), 0)
    assert set(labels[train]) == {0, 1, 2} and set(labels[val]) == {0, 1}


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_groups(count):
    labels = np.arange(10) % 2
    groups = np.zeros(10, int) if count == 1 else labels  # each class one group
    with pytest.raises(DataError, match=f"{count} groups are too few for 2 parts"):
        group_split(labels, groups, (0.9, 0.1), 0)
    with pytest.raises(DataError, match="cross-validation needs two"):
        group_folds(labels, np.zeros(10, int), 5, 0)


@pytest.mark.parametrize("seed", range(3))
def test_folds_are_as_even_as_those_of_scikit_learn(seed):
    labels, groups = patients(seed)
    folds = deal(labels, seed, groups)
    assert len(np.unique(np.stack([folds, groups]), axis=1).T) == len(np.unique(groups))  # one fold for each group
    ours = max(unevenness(labels, folds == fold, 1 / FOLDS) for fold in range(FOLDS))
    split = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed).split(labels, labels, groups)
    theirs = max(unevenness(labels, part, 1 / FOLDS) for _, part in split)
    assert ours < theirs + 0.03
    few = np.minimum(groups, 2)
    assert set(deal(labels, seed, few)) == {0, 1, 2}


def test_a_probe_is_judged_on_groups_that_it_has_not_seen():
    """Features that know the patient and nothing else: images of a patient answer for each other, unless held out."""
    import torch

    groups = np.repeat(np.arange(24), 5)
    labels = (np.arange(24) % 2)[groups]
    features = torch.from_numpy(RANDOM.normal(size=(24, 40))[groups] + 0.05 * RANDOM.normal(size=(120, 40))).float()
    truth = torch.from_numpy(labels)
    right = {
        name: float((fit_probe(features, truth, 2, groups=g).held_out.argmax(dim=1) == truth).float().mean())
        for name, g in (("torn", None), ("kept", groups))
    }
    assert right["torn"] > 0.95 and right["kept"] < 0.75


def test_few_labels_of_groups():
    labels, groups = patients(3)
    half, quarter = (few_labels(labels, ["a", "b", "c"], 0, fraction=f, groups=groups) for f in (0.5, 0.25))
    for part, share in ((half, 0.5), (quarter, 0.25)):
        assert not set(groups[part]) & set(np.delete(groups, part))  # complete groups
        assert abs(len(part) / len(labels) - share) < 12 / len(labels)
    assert set(quarter) <= set(half)
    ten = few_labels(labels, ["a", "b", "c"], 0, per_class=10, groups=groups)
    assert np.bincount(labels[ten]).tolist() == [10, 10, 10]
    assert len(set(groups[ten])) < len(set(groups[few_labels(labels, ["a", "b", "c"], 0, per_class=10)]))


# ------------------------------------------------------------------------------------------------- from files


def photos(root, names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (3, 4)).save(root / name)
    return str(root)


def by_group(data, pattern):
    import re

    parts = {}
    for split in ("train", "val", "test"):
        dataset = getattr(data, split)
        if dataset is not None:
            parts[split] = {re.search(pattern, dataset.name_of(i))[1] for i in range(len(dataset))}
    return parts


def test_groups_by_the_folder_or_by_an_expression(tmp_path):
    names = [f"{'cat' if (p + i) % 3 else 'dog'}/p{p}/{i}_day{p // 2}.png" for p in range(8) for i in range(3)]
    source = photos(tmp_path / "patient9", names)
    for rule, pattern in (("parent", r"/(p\d)/"), (r"re:/(p\d)/", r"/(p\d)/"), (r"re:day\d", r"(day\d)")):
        data = open_data(source, val_fraction=0.25, files=FileOptions(group=rule))
        parts = by_group(data, pattern)
        assert parts["train"] and parts["val"] and not parts["train"] & parts["val"]
        assert set(data.val.labels) == {0, 1} and data.train.groups is not None
    same = by_group(open_data(source, val_fraction=0.25), r"/(p\d)/")
    assert same["train"] & same["val"]  # without groups they are torn apart


def test_groups_follow_their_images(tmp_path):
    """Through parts of parts, other labels, and captions."""
    names = [f"{c}/p{p}_{i}.png" for c in ("cat", "dog") for p in range(3) for i in range(2)]
    files = FileDataset([str(Path(photos(tmp_path, names)) / n) for n in names], np.repeat([0, 1], 6), ["cat", "dog"])
    array = ArrayDataset(np.zeros((12, 2, 3, 1), dtype=np.uint8), files.labels, files.classes, "x")
    captioned = Captioned(files, Captions([[name] for name in names]))
    for dataset in (files, array, captioned):
        dataset.groups = np.arange(12) // 2
        part = subset(subset(dataset, np.array([1, 4, 5, 10])), [3, 1])
        assert part.groups.tolist() == [5, 2]
        later = subset(dataset, np.arange(6, 12))
        later.groups = np.array([7, 7, 8, 8, 9, 9])  # given to a part
        assert subset(later, [0, 5]).groups.tolist() == [7, 9]
        if dataset is not captioned:
            assert relabelled(dataset, 1 - dataset.labels).groups.tolist() == dataset.groups.tolist()


def test_groups_by_a_column(tmp_path):
    photos(tmp_path, [f"{i}.png" for i in range(24)])
    rows = [f"{i}.png,{'ab'[i % 2]},P{i // 3}" for i in range(24)]
    (tmp_path / "t.csv").write_text("path,label,Patient\n" + "\n".join(rows), encoding="utf-8")
    data = open_data(str(tmp_path / "t.csv"), val_fraction=0.25, files=FileOptions(group="patient"))
    ids = [{int(d.name_of(i).split("/")[-1][:-4]) // 3 for i in range(len(d))} for d in (data.train, data.val)]
    assert not ids[0] & ids[1] and len(ids[0] | ids[1]) == 8
    with pytest.raises(DataError, match=r"no column doctor, which data.group names \(found path, label, patient\)"):
        open_data(str(tmp_path / "t.csv"), files=FileOptions(group="doctor"))
    (tmp_path / "t.csv").write_text("path,label,patient\n0.png,a,\n1.png,b,P\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 2: the group is empty"):
        open_data(str(tmp_path / "t.csv"), files=FileOptions(group="patient"))


@pytest.mark.parametrize(
    ("rule", "error", "says"),
    [
        ("patient", UsageError, "only a table"),
        ("re:(", UsageError, "is no regular expression"),
        ("re:(p)(.)", UsageError, "has 2 groups"),
        ("re:(doctor)", DataError, r"12 of 12 paths do not match, e\.g\. cat/p0/0\.png, .*, .*\. Correct"),
        ("re:^(cat|dog)/", DataError, "gives one group for each class"),
        ("re:(png)", DataError, "1 groups are too few"),
    ],
)
def test_rules_that_cannot_be(tmp_path, rule, error, says):
    source = photos(tmp_path / "x", [f"{c}/p{p}/{i}.png" for c in ("cat", "dog") for p in range(3) for i in range(2)])
    with pytest.raises(error, match=says):
        open_data(source, files=FileOptions(group=rule))


def test_a_group_in_two_splits_of_the_source_itself(tmp_path):
    names = [f"{split}/{c}/{p}_{i}.png" for split, p in (("train", "p1"), ("val", "p2")) for c in "ab" for i in (1, 2)]
    source = photos(tmp_path / "x", names)
    assert open_data(source, files=FileOptions(group=r"re:(p\d)_")).val.groups is not None
    photos(tmp_path / "x", ["val/a/p1_9.png"])
    with pytest.raises(DataError, match=r"1 groups of data.group=.* 'p1' in train and val"):
        open_data(source, files=FileOptions(group=r"re:(p\d)_"))
