"""Model families built on the ops; each folder holds one family's config, checkpoints and modules."""
