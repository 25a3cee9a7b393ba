"""The default `select` keeps the rows with the highest scores, of equal ones the newer."""

import reference
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.hooks.defaults import top_rows

few_scores = st.sampled_from([float("-inf"), -1.5, -0.0, 0.0, 2.0, float("inf")])
dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


@given(st.data(), dtypes, st.integers(1, 30), st.integers(1, 32))
def test_the_highest_scores_stay_and_of_equal_ones_the_newer(
    data: st.DataObject, dtype: torch.dtype, num_rows: int, budget: int
) -> None:
    drawn = data.draw(st.lists(few_scores, min_size=6 * num_rows, max_size=6 * num_rows))
    scores = torch.tensor(drawn).view(2, 3, num_rows)
    expected = [
        [reference.top_rows(head.tolist(), budget) for head in sequence] for sequence in scores
    ]
    kept = top_rows(scores.to(dtype), budget)
    assert kept.dtype == torch.int64
    assert kept.is_contiguous()  # hooks may view it
    assert kept.tolist() == expected
