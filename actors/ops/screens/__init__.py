"""Screens of `actors up`, `actors top` and `actors status`: functions of the packer's progress."""
