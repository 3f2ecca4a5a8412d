"""The checker behind ``--shapes``: beartype, with an int where a float is annotated, as PEP 484 and mypy have it."""

from beartype import BeartypeConf, beartype

typechecker = beartype(conf=BeartypeConf(is_pep484_tower=True))
