"""Problems with several branches: MOptEq, POptEq, and problems in parallel."""
