"""Times are counted here and not judged, so nothing needs to rest between them."""

import pytest

from vitlab.export import timing


@pytest.fixture(scope="session", autouse=True)
def without_pauses():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "PAUSE", 0.0)
        yield
