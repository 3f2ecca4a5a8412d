"""Experiments: a typed configuration goes in, records on disk come out. Nothing is drawn here."""
