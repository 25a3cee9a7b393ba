"""The tasks that come with kvpolicy; each is found by its entry point, as a stranger's are."""
