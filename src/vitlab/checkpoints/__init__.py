"""Weights <-> files: the native folder, and every dialect people bring; only this package knows foreign key names."""
