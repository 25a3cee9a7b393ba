"""A decode step stays short: few Python calls, few files, and no hook that no policy wants."""

from profile_step import profile_step


def test_a_decode_step_makes_few_calls_in_few_files() -> None:
    profile = profile_step()
    assert len(profile.calls) <= 62, f"half of what it once was\n{profile}"
    assert len(profile.files) <= 12, profile


def test_a_step_without_compaction_asks_no_policy() -> None:
    profile = profile_step()
    assert not {file for file in profile.files if "kvpolicy_" in file or "hooks/m" in file}
