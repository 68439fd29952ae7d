"""Native CPU kernels for glm5sdk."""
