"""`actors up`: all actors of a run on a single machine; also pools of servers that come and go."""
