import pytest
from kvpolicy_usage import LastUsed, Question, Unusual

from kvpolicy.testing import check_policy


@pytest.mark.parametrize("policy", [LastUsed, Question, Unusual])
def test_policy_keeps_the_contract(policy: type) -> None:
    check_policy(policy, max_examples=10)
