"""Multi-head latent attention: projections, cache writes, dense and sparse attention."""
