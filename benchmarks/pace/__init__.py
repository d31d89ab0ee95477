"""Envs at their own pace."""
