"""The lightning indexer: projections, cache writes, selection and its training loss."""
