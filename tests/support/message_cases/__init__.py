"""What users do wrong, by the package that answers: the cases of the catalogue `tests/messages`.

A module here is named after a package and has ``CASES``: the name of a case = a function that gets
an empty folder and raises an error of kvpolicy, or returns what a command printed to stderr.
"""
