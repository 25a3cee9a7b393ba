from kvpolicy_recency import Recency

from kvpolicy.testing import check_policy


def test_recency_keeps_the_contract() -> None:
    check_policy(Recency, max_examples=20)
