"""Where a contender is measured: its budget at an accuracy, its batch within a memory."""
