"""The commands: one file each, named after it. `options` is what they share, `source` reads what they are given."""
