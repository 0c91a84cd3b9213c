"""Image search: an index of the embeddings of a folder, kept up to date, and its nearest neighbours of a query.

    from functools import partial
    from vitlab.search import Index, update

    update("photos.index", "photos", made_by, partial(vitlab.embed, model))    # `vitlab index` does this
    Index("photos.index").search(vitlab.embed_text(model, "a dog")[0])         # `vitlab search` does this

Nothing here depends on a model: the caller passes the function that embeds images.
"""

from vitlab.errors import SearchError
from vitlab.search.index import Counts, check, update
from vitlab.search.query import Hit, Index, open_database

__all__ = ["Counts", "Hit", "Index", "SearchError", "check", "open_database", "update"]
