"""Where models come from: each source builds one on the meta device."""
