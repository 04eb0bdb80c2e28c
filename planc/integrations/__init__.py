"""planc inside other libraries' training loops; each file imports its library."""
