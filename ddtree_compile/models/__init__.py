"""From a model's config to logical graphs: one file a target, the drafter, and the round that joins them."""
