"""Expert parallelism: rows travel to the ranks that own their experts, and back."""
