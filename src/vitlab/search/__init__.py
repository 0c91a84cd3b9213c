"""Search in a folder of pictures: vectors of all of them, kept up to date, and the nearest to one that is asked for.

    from functools import partial
    from vitlab.search import Index, update

    update("photos.index", "photos", made_by, partial(vitlab.embed, model))    # `vitlab index` does this
    Index("photos.index").search(vitlab.embed_text(model, "a dog")[0])         # `vitlab search` does this

Nothing here knows a model: whoever calls brings the function that makes vectors of pictures.
"""

from vitlab.search.index import Counts, check, update
from vitlab.search.ledger import SearchError
from vitlab.search.query import Hit, Index, open_ledger

__all__ = ["Counts", "Hit", "Index", "SearchError", "check", "open_ledger", "update"]
