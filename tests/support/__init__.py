"""Models on disk, planted drafters and oracles for the tests."""
