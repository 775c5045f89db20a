"""What people see of a run in `actors up`, `actors top` and `actors status`: functions of the packer's progress."""
