"""What other people's libraries gain from the ops: one module a library, imported only by who uses it."""
