"""Tests of laconic; helpers are imported as `tests.parts`."""
