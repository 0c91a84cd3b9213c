"""index_folder, search_index and embed_dataset: a model or a name gives what the commands give."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

import vitlab
from vitlab.errors import UsageError
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
