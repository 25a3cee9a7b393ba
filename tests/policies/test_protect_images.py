"""ProtectImages pins the rows of images under any score."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Drawn, budgets, caches

from kvpolicy.engine.eviction.select_rows import CacheView, select_rows


@given(st.data(), caches(num_queries=1))
def test_images_stay_and_else_the_newest_rows(data: st.DataObject, drawn: Drawn) -> None:
    """An oracle in plain lists; of images that do not fit, the newest stay."""
    positions = torch.arange(drawn.num_rows).expand(drawn.keys.shape[:3]).contiguous()
    marks = data.draw(
        st.lists(st.booleans(), min_size=drawn.num_rows, max_size=drawn.num_rows), "images"
    )
    budget = data.draw(budgets(drawn.num_rows))
    is_image = torch.tensor(marks).expand(positions.shape)
    view = CacheView(positions=positions, keys=drawn.keys, is_image=is_image)
    kept = select_rows(["protect_images"], view, budget=budget).keep
    images = [row for row, mark in enumerate(marks) if mark][-budget:]
    others = [row for row, mark in enumerate(marks) if not mark]
    room = budget - len(images)
    expected = sorted([*images, *(others[-room:] if room else [])])
    assert (kept == torch.tensor(expected)).all()


def test_without_images_nothing_is_protected() -> None:
    view = CacheView(positions=torch.arange(9).expand(1, 2, 9))
    kept = select_rows(["streaming", "protect_images"], view, budget=6).keep
    assert torch.equal(kept, select_rows(["streaming"], view, budget=6).keep)
