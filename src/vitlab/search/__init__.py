"""Image search: an index of the embeddings of a folder, kept up to date, and its nearest neighbours of a query.

    from vitlab import search

    search.index_folder("photos", "photos.index", "bundled:dino")           # as `vitlab index`
    search.search_index("photos.index", image="cat.jpg").hits               # as `vitlab search`
    search.embed_dataset("photos", "photos.parquet", "bundled:dino")        # as `vitlab embed`

With a function of your own that embeds images: update("photos.index", "photos", made_by, embed), and
Index("photos.index").search(vector).
"""

from vitlab.errors import SearchError
from vitlab.search.api import SearchResult, embed_dataset, index_folder, search_index
from vitlab.search.index import Counts, check, update
from vitlab.search.query import Hit, Index, open_database

__all__ = [
    "Counts",
    "Hit",
    "Index",
    "SearchError",
    "SearchResult",
    "check",
    "embed_dataset",
    "index_folder",
    "open_database",
    "search_index",
    "update",
]
