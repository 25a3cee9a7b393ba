"""A decode step makes few Python calls in few files and calls no unused hook."""

from profile_step import profile_step


def test_decode_step_makes_few_calls_in_few_files() -> None:
    profile = profile_step()
    assert len(profile.calls) <= 101, f"too many calls\n{profile}"
    assert len(profile.files) <= 19, profile


def test_step_without_compaction_calls_no_policy() -> None:
    profile = profile_step()
    assert not {file for file in profile.files if "kvpolicy_" in file or "hooks/m" in file}
