"""The numeric proof of a plan: simulated (flow) or on processes (verify); imports nothing."""
