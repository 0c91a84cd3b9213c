"""index_folder, search_index and embed_dataset: a model or a name gives what the commands give."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

import vitlab
from vitlab.errors import SearchError, UsageError
from vitlab.search import embed_dataset, index_folder, search_index


def test_a_model_and_its_name_make_the_same_index(checkpoint, photos, tmp_path):
    counts = index_folder(photos, tmp_path / "named", checkpoint)
    assert (counts.model, counts.new, counts.images) == (str(checkpoint), 23, 23)
    assert index_folder(photos, tmp_path / "named").unchanged == 23  # by the model that made it
    model = vitlab.load(checkpoint)
    index_folder(photos, tmp_path / "given", model)
    query = photos / "a" / "03.png"
    named = search_index(tmp_path / "named", image=query, top=3)
    given = search_index(tmp_path / "given", image=Image.open(query), top=3, model=model)
    assert [hit.path for hit in named.hits] == [hit.path for hit in given.hits] and named.hits[0].path == query
    assert (named.images, named.folder, named.model) == (23, photos, str(checkpoint))
    assert "03.png" in named.page() and named.sheet().axes


def test_the_model_of_an_index_that_was_given_must_be_given_again(checkpoint, photos, tmp_path):
    index_folder(photos, tmp_path / "index", vitlab.load(checkpoint))
    with pytest.raises(UsageError, match="The index was made with it"):
        search_index(tmp_path / "index", image=photos / "a" / "03.png")


def test_wrong_queries(checkpoint, photos, tmp_path):
    index_folder(photos, tmp_path / "index", checkpoint)
    for query, message in [
        ({}, "by a text or by an image"),
        ({"text": "a", "image": "b"}, "by a text or by an image"),
        ({"text": " "}, "the text is empty"),
        ({"text": "a dog"}, "reads no text"),
        ({"image": photos / "a" / "03.png", "top": 0}, "top=0"),
    ]:
        with pytest.raises(UsageError, match=message):
            search_index(tmp_path / "index", **query)
    with pytest.raises(UsageError, match="which model makes it"):
        index_folder(photos, tmp_path / "new")


def test_a_table_of_a_source(checkpoint, photos, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    table = embed_dataset(photos, tmp_path / "photos.parquet", checkpoint)
    assert (table.data, table.model, table.images) == (str(photos), str(checkpoint), 23)
    row = pq.read_table(tmp_path / "photos.parquet").to_pylist()[0]
    (embedding,) = vitlab.embed(vitlab.load(checkpoint), photos / row["path"])
    np.testing.assert_allclose(row["embedding"], embedding.vector, atol=1e-6)
    with pytest.raises(UsageError, match=r"name it .*photos\.parquet"):
        embed_dataset(photos, tmp_path / "photos.csv", checkpoint)


def test_an_index_remembers_its_image_size_and_refuses_another(checkpoint, photos, tmp_path):
    index, size = tmp_path / "larger", (32, 40)
    index_folder(photos, index, checkpoint, image_size=size)
    image = next(path for path in sorted(photos.rglob("*")) if path.suffix in (".png", ".jpg"))
    hits = search_index(index, image=image, top=3).hits  # without the size: as it was made
    model = vitlab.load(checkpoint, image_size=size)
    cosines = {e.name: float(e.vector @ vitlab.embed(model, image)[0].vector) for e in vitlab.embed(model, photos)}
    for hit in hits:
        assert hit.score == pytest.approx(cosines[str(hit.path)], abs=1e-5)
    assert [hit.score for hit in search_index(index, image=image, top=3, image_size=size).hits] == [
        hit.score for hit in hits
    ]
    with pytest.raises(SearchError, match="was made with images of 32 x 40 pixels, not of 16 x 16"):
        search_index(index, image=image, image_size=16)
    with pytest.raises(SearchError, match=r"--image-size 32x40"):
        index_folder(photos, index, checkpoint, image_size=(16, 24))
    assert index_folder(photos, index).unchanged > 0  # and an update keeps it
    assert index_folder(photos, index, checkpoint).unchanged > 0
    with pytest.raises(UsageError, match="the model is loaded already"):
        index_folder(photos, tmp_path / "other", model, image_size=8)
