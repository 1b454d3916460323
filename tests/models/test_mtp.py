"""The layer that predicts the token after the next one, against code in torch and documents one by one."""
